"""From a prompt to a request and from tokens to a completion: no model, no scheduling."""
