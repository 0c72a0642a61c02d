"""`python -m transformers_llamacpp`"""

import sys

from .cli import main

sys.exit(main())
