"""b2gmodel: where to batch, and how many batches to keep in flight, from one single-flight calibration."""

__version__ = "0.1.0"
