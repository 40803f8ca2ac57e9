#!/usr/bin/env bash
# Submits a training workload of RunAI: 1 master and 3 workers, all of which train. Copy it, set the lines with <-, and
#
#   bash runai.sh
#
# docs/clusters.md explains it.
set -euo pipefail

name=llama
project=team-a                                      # <-
image=registry.example.com/elastictrain:latest      # <-
workers=3                                           # <- besides the master
gpus=8                                              # <- of each pod
cli=2.24                                            # <- version of the command `runai`: 2.24 (and newer), or 2.18

run=(
    recipe=llama_fsdp
    run.dir=s3://bucket/llama       # <-
    data.path=s3://bucket/tokens    # <-
    launch.min_hosts=1
    fault.notice_s=240              # for saving, after SIGTERM: shorter than the grace period
)

if [[ "$cli" == 2.18 ]]; then
    # It has no option for the time between SIGTERM and SIGKILL, which is the 30 s of Kubernetes then.
    exec runai submit-dist pytorch \
        --name "$name" \
        --project "$project" \
        --image "$image" \
        --workers "$workers" \
        --gpu "$gpus" \
        --large-shm \
        --backoff-limit 100 \
        --command -- python -m elastictrain.launch "${run[@]/#fault.notice_s=*/fault.notice_s=25}"
fi

# For RDMA: --annotation k8s.v1.cni.cncf.io/networks=rdma-net --capability IPC_LOCK
#     --extended-resource rdma/hca_shared_devices_a=1 --master-extended-resource rdma/hca_shared_devices_a=1
# Credentials of a bucket: --env-secret AWS_ACCESS_KEY_ID=bucket,key=id --env-secret AWS_SECRET_ACCESS_KEY=bucket,key=secret
runai training pytorch submit "$name" \
    --project "$project" \
    --image "$image" \
    --workers "$workers" \
    --gpu-devices-request "$gpus" \
    --master-gpu-devices-request "$gpus" \
    --preemptibility preemptible \
    --large-shm \
    --termination-grace-period 300s \
    --restart-policy OnFailure \
    --master-restart-policy OnFailure \
    --backoff-limit 100 \
    --env-pod-field-ref POD_IP=status.podIP \
    --command -- python -m elastictrain.launch "${run[@]}"
