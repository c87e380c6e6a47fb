"""One attention function for packed training and paged generation."""

from .varlen import Pages, Varlen

__all__ = ["Pages", "Varlen"]
