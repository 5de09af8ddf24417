"""`python -m clover_trt.cli`."""

from clover_trt.cli import main

main()
