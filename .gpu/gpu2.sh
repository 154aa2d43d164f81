# pytest on one rank (b: 105 s on the first day), lines without a tick, then tests of 2 to 4 ranks that share the GPU (d). At most 235 s.
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 O="$OUT" D=${DEV:-cuda} L=${LIMIT:-230}
mkdir -p /tmp/p; cat >/tmp/p/many.py <<P
def pytest_collection_modifyitems(items):
    items[:] = [i for i in items if getattr(i, "callspec", None) and (i.callspec.params.get("world_size") or 1) > 1]
P
cat >/tmp/p/summary.py <<P
import collections, json, sys
t = [json.loads(l) for l in open(sys.argv[1])]
print(sys.argv[1], dict(collections.Counter(x["outcome"] for x in t)))
print(*sorted({x["id"] for x in t if x["outcome"] == "failed"})[:60], sep="\n")
P
echo "== one rank at $SECONDS s"
timeout -k 5 125 python3 -m tests.gpu --part 2 --device $D --out /tmp/o/one; echo "== rc $? at $SECONDS s"
cp /tmp/o/one/tests.jsonl $O/one.jsonl; tail -c 8000000 /tmp/o/one/tests.log >$O/one.log
python3 /tmp/p/summary.py $O/one.jsonl
timeout -k 5 40 python3 -m tests.gpu --part 1 --device $D --out /tmp/o/lines --lines alignment,background-save
cat /tmp/o/*/results.jsonl >$O/lines.jsonl; cp docs/notes/gpu-results/$(date +%F).md $O; tail -n1 $O/lines.jsonl
t=$((L-SECONDS)); echo "== several ranks at $SECONDS s, for $t s"
# files in reverse: the first day's runs were cut off before the last ones
python3 -c "
from tests.gpu.lines.suite import _groups
for i in _groups(${SMALL:-False}): print(*reversed(i))" >/tmp/p/groups
n=0; while read -r files; do n=$((n+1))
PYTHONPATH=/tmp/p:$PWD timeout -k 5 $t env tests.jsonl=$O/many.jsonl python3 -m pytest -q -p no:cacheprovider -p many -p tests.gpu.logged_tests --device $D --ranks-per-device 4 --tb=short $files >/tmp/p/log$n 2>&1 &
done </tmp/p/groups; wait
cat /tmp/p/log*|tail -c 8000000 >$O/many.log; python3 /tmp/p/summary.py $O/many.jsonl; echo "== end at $SECONDS s"; true
