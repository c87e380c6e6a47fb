"""The commands of `nopad`, one module each."""
