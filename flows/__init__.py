"""Order of the steps, forms and the command line."""

import os
import sys

if sys.platform == "win32":  # else the first import of a lock would end in a traceback
    sys.exit("error  herd needs Linux; on Windows use WSL 2")

# Before pyarrow is imported: its own allocator keeps 0.1 GiB of a data step while the trainer needs it
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
