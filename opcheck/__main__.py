"""`python -m opcheck` is the command `opcheck`."""

from opcheck.cli import main

raise SystemExit(main())
