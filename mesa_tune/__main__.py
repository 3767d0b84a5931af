"""`python -m mesa_tune`: the command `mesa-tune` of this Python."""

from mesa_tune.cli import main

main()
