"""Scripts to run or copy: pretraining, fine-tuning and the evaluation of a checkpoint."""
