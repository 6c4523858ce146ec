"""A fine-tuning pipeline that knows whether the tuning helped."""

__version__ = "0.1.0"
