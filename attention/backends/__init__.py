"""One file per kernel library, all with the same three functions; `choice` picks among them."""
