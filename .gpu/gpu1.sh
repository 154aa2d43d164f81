# Offloaded steps beside FSDP2 (a), steps without offload (c). At most 350 s.
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
r(){ n=$1 t=$2; shift 2; l=$((${LIMIT:-345}-SECONDS)); [ $l -lt $t ]&&t=$l
[ $t -lt 10 ]&&{ echo "== $n: no time";return; }; echo "== $n at $SECONDS s: $*"
timeout -k 5 $t "$@" 2>&1|tee "$OUT/$n.log"; echo "== $n: rc ${PIPESTATUS[0]} at $SECONDS s"; }
{ nvidia-smi -L; nproc; free -g|head -2; git log -1 --format=%h\ %s; ulimit -l; python3 -c "import torch;print(torch.__version__,torch.cuda.get_device_name())"; } 2>&1|tee "$OUT/machine.log"
M="--device ${DEV:-cuda} --model ${MODEL:-gpt-1.3b} --repeat 1 --world 1 --threads $(nproc)"
# offload: clip_mode="wait"; held: the same, gradients fetched during the step
r offload 215 python3 benchmarks/offload.py $M --steps 7 --timeout 90 --variants offload,fsdp2,held,none --out "$OUT/offload.json"
r steps 150 python3 benchmarks/run.py $M --precision bf16 --steps 10 --timeout 90 --engines fairshard,fairshard-fully-shard,fsdp2 --out "$OUT/steps.json"
ls -l "$OUT"; true
