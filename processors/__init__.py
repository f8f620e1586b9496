"""The pure core that decides what an input means for a session: no clock, no randomness, no I/O, no driver."""
