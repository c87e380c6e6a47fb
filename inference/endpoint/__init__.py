"""An OpenAI-compatible HTTP server on an engine, alone or beside a running training."""

from .server import Server, serve

__all__ = ["Server", "serve"]
