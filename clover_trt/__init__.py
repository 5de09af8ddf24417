"""Clover TRT: build, run and serve engines for Clover block-diffusion language models."""

__version__ = "0.1.0"
