"""A continuous-batching engine on the model that is being trained."""
