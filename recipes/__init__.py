"""Scripts to run or copy: pretraining and fine-tuning."""
