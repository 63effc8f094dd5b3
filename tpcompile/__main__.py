"""`python -m tpcompile` runs the `tpcompile` command."""

from tpcompile.cli import main

raise SystemExit(main())
