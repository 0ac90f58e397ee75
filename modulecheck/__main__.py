"""`python -m modulecheck` is the command `modulecheck`."""

from modulecheck.cli import main

raise SystemExit(main())
