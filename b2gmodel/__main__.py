"""``python -m b2gmodel`` is ``b2g``."""

from b2gmodel.cli import main

main()
