"""What holds for every test: one Hypothesis profile that prints failing examples, and the real services."""

import os
import tempfile

from hypothesis import settings

pytest_plugins = ["tests.services"]

# Where no test names a data directory nothing may be left in the user's own.
_data_dir = tempfile.TemporaryDirectory(prefix="onepen-data-")
os.environ.setdefault("ONEPEN_DATA_DIR", _data_dir.name)

settings.register_profile("onepen", deadline=None, print_blob=True)
settings.load_profile("onepen")
