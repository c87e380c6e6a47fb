"""Scripts a user runs; `python -m nopad.recipes.pretrain` starts one too."""
