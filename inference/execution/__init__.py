"""Running one step: the model, CUDA graphs, the sampler, transfers and the memory budget."""
