"""The demonstrations: the founding story, the re-enactment of recordings, and the checks that judge both."""
