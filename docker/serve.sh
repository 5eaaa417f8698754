#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The image's entry point. What the doctor finds is told and stops nothing: vLLM may serve without this fork.
# Its questions run at once, and each imports torch or vLLM: from an image not yet in memory 15 s were too few for vLLM.
timeout 60 python -m flashinfer sm12x-doctor --timeout 45 ||
    echo "sm12x-doctor found what its table says, or took over a minute; the server starts all the same" >&2
# The words of `docker run` replace the image's, so the defaults that leave a Spark its memory stand here. Options given
# later win; those in a file of options would not.
case " $* " in
*" --config "*) ;;
*)
    model=
    case "$1" in
    -* | "") ;;
    *) model=$1 && shift ;;
    esac
    set -- ${model:+"$model"} --gpu-memory-utilization "${MEMORY:-0.7}" --max-num-seqs 32 "$@"
    ;;
esac
exec vllm serve "$@"
