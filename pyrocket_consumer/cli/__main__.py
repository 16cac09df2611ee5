"""`python -m pyrocket_consumer.cli`: the `pyrocket` command."""

import sys

from pyrocket_consumer.cli import main

sys.exit(main())
