"""`python -m tpcompile` is the command `tpcompile`."""

from tpcompile.cli import main

raise SystemExit(main())
