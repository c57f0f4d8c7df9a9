#!/usr/bin/env bash
# From a fresh clone to a trained model that writes: set-up, corpus, training with evaluation, generation.
# Everything is kept: a second call uses it again, and continues the training if it had been interrupted.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh" test # the tests' extras too, so that launch/test.sh finds everything there

cd "$root"
dstrain="$root/.venv/bin/dstrain"
run=runs/quickstart
step() { printf '\n== %s\n' "$*"; }

step "corpus: the Python standard library's sources"
"$root/.venv/bin/python" data/build_corpus.py

step "training: $run"
"$dstrain" train recipe=quickstart run.name=quickstart

if grep -qs interrupted "$run/status.json"; then
    step "interrupted: call this script again to continue"
    exit 0
fi

step "generation, after the words: def __init__(self"
"$dstrain" generate checkpoint="$run" prompt='def __init__(self' echo=true max_tokens=128 temperature=0.5 seed=1

step "where everything lies, in $root"
cat <<END
  .venv/                     Python and the packages; .venv/bin/dstrain is the command
  data/cache/                corpus: tokenizer and token files
  $run/config.yaml           the whole configuration of the run
  $run/metrics.jsonl         one line for each optimizer step
  $run/eval.jsonl            held-out loss
  $run/checkpoints/          where a continued run starts from
next:
  .venv/bin/dstrain generate checkpoint=$run prompt='class '
  .venv/bin/dstrain train data=text data.text=YOUR_FILE_OR_FOLDER run.name=mine
  bash launch/test.sh
END
