#!/bin/bash
# Train on several machines under Slurm; a job that is requeued, or submitted again, resumes.
#   RUN=/shared/runs/mine sbatch recipes/launch/slurm.sh --data s3://bucket/corpus/ --budget 8192
#SBATCH --job-name=nopad
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

RUN=${RUN:?set RUN to a folder that all machines see}
RECIPE=${RECIPE:-recipes/pretrain.py}
GPUS=${SLURM_GPUS_ON_NODE:-8}
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Otherwise restarted workers may connect to dead ones (pytorch/pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# The recipe finds its last intact checkpoint; workers that torchrun restarts do so by themselves.
if [ -e "$RUN/run.json" ]; then PLACE=(--resume "$RUN"); else PLACE=(--output "$RUN"); fi

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$GPUS" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${HOSTS[0]}:29500" \
    "$RECIPE" "${PLACE[@]}" "$@"
