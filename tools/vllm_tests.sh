#!/usr/bin/env bash
# Fetches one file of vLLM's own tests from its source distribution, and prints where
# it lies: they are run against our manager, and never committed. Usage:
#   tools/vllm_tests.sh                        # the manager's tests of 0.32.0
#   tools/vllm_tests.sh 0.33.0
#   tools/vllm_tests.sh 0.32.0 tests/v1/...py  # another file
# What is there already is kept. About five seconds otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version="${1:-0.32.0}"
file="${2:-tests/v1/kv_offload/cpu/test_manager.py}"
venv="${VLLM_VENV:-.venv-vllm}"
out="$venv/vllm-$version-tests/$(basename "$file")"

if [ ! -s "$out" ]; then
  work="$(mktemp -d)"
  trap 'rm -rf "$work"' EXIT
  # pip unpacks a source distribution and then asks it for its metadata. That fails
  # here, since vLLM's build tools are not installed, and the unpacked tree stays.
  # If they are installed it works, and the archive stays.
  TMPDIR="$work" "$venv/bin/python" -m pip --quiet download "vllm==$version" \
    --no-deps --no-binary :all: --no-build-isolation --no-clean --dest "$work/archive" \
    > "$work/pip.log" 2>&1 || true
  found="$(find "$work" -path "*/$file" -print -quit)"
  archive="$(find "$work/archive" -name 'vllm-*.tar.gz' -print -quit 2> /dev/null || true)"
  if [ -z "$found" ] && [ -n "$archive" ]; then
    mkdir "$work/tree"
    tar -xzf "$archive" -C "$work/tree" --wildcards "*/$file" || true
    found="$(find "$work/tree" -path "*/$file" -print -quit)"
  fi
  if [ -z "$found" ]; then
    tail -n 5 "$work/pip.log" >&2
    echo "$file of vllm $version could not be fetched; pip said the above. Needed: a" \
      "package index that has vLLM's source distribution." >&2
    exit 1
  fi
  mkdir -p "$(dirname "$out")"
  cp "$found" "$out.new"
  mv "$out.new" "$out"
fi
echo "$out"
