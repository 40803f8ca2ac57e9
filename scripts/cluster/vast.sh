#!/usr/bin/env bash
# Rents instances of Vast on one overlay network, and trains on them. Copy it, set the lines with <-, look for offers of one
# physical cluster, and name those that you want:
#
#   vastai search offers 'cluster_id=1234 num_gpus=8'
#   bash vast.sh OFFER [OFFER...]
#
# One offer alone needs no overlay and may be anywhere. `pip install vastai` (1.9 or newer) has the command.
# docs/clusters.md explains it.
set -euo pipefail

cluster=1234                                        # <- of the offers: `vastai search offers --raw cluster_id!=None`
overlay=llama
image=registry.example.com/elastictrain:latest      # <- with elastictrain installed
disk=200                                            # <- GB

run=(
    recipe=llama_fsdp
    run.dir=s3://bucket/llama       # <- credentials: environment variables of your account on Vast
    data.path=s3://bucket/tokens    # <-
    launch.min_hosts=1
)

(($#)) || { echo "usage: bash vast.sh OFFER [OFFER...]" >&2; exit 64; }

# An interruptible instance is paused without notice; when it comes back, this is run again. 64, 70 and 78: that would not help.
again="until python -m elastictrain.launch ${run[*]@Q}; do case \$? in 64|70|78) break ;; esac; sleep 30; done"

options=()
if (($# > 1)); then
    # The command cannot do this any more (1.9.1); its Python package can. It needs the same key of your account.
    python3 -c "import vastai; vastai.VastAI().create_overlay(cluster_id=$cluster, name='$overlay')"
    options=(-n "$overlay" -e "PET_NNODES=$#")
fi
rank=0
for offer in "$@"; do
    environment=("${options[@]}")
    (($# > 1)) && environment+=(-e "PET_NODE_RANK=$rank")
    # For an interruptible instance: --bid_price DOLLARS_PER_HOUR
    vastai create instance "$offer" --image "$image" --disk "$disk" --ssh --direct --label "llama-$rank" \
        --env "${environment[*]}" --onstart-cmd "($again) >>/var/log/elastictrain.log 2>&1 &"
    rank=$((rank + 1))
done
