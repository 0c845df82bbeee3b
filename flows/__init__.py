"""Order of the steps, forms and the command line."""

import sys

if sys.platform == "win32":  # else the first import of a lock would end in a traceback
    sys.exit("error  herd needs Linux; on Windows use WSL 2")
