#!/usr/bin/env bash
# Runs the kernels' tests under sanitizers: memory errors and undefined behaviour at each level of
# this machine's instructions, then races between threads, if there is a clang++ that knows OpenMP.
# Needs g++; PYTEST_ARGS="-n 2 --dist loadfile" uses two cores. A run takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
flags="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
tests=(tests/test_kernels_{attention,elementwise,lora,matmul,packing,sampling,team}.py
       tests/test_{tape,quantise_k,native_calls}.py)
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT

# the library's own -march=native comes first, so that these win
case $(uname -m) in
  x86_64) levels=("" -march=x86-64-v3 -march=x86-64) ;;
  *) levels=("" -DKERNELS_WITHOUT_NEON) ;;
esac
# python is not built with a sanitizer, so its library must be there before all others
for level in "${levels[@]}"; do
  echo "memory and undefined behaviour: ${level:--march=native}"
  CXX=g++ XDG_CACHE_HOME="$cache" MISTRALRS_KERNEL_CXXFLAGS="$flags $level" OMP_NUM_THREADS=2 \
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    "$python" -m pytest -q --timeout=900 ${PYTEST_ARGS:-} "${tests[@]}"
done

# GNU's OpenMP does not tell ThreadSanitizer where threads wait for each other; LLVM's does
clang=$(compgen -c clang++ | grep -E '^clang\+\+(-[0-9]+)?$' | sort -u | head -1 || true)
if [ -z "$clang" ]; then
  echo "races: not looked for, there is no clang++ (on Debian: apt install clang libomp-dev)"
  exit
fi
echo "races: $clang"
openmp=$(dirname "$(readlink -f "$(command -v "$clang")")")/../lib
"$clang" -std=c++17 -O1 -g -march=native -ffp-contract=off -fopenmp -fsanitize=thread -w \
  mistralrs_sdk/kernels/src/*.cpp tests/kernel_threads.cpp -L"$openmp" -Wl,-rpath,"$openmp" \
  -o "$cache/threads"
TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1" \
  OMP_TOOL_LIBRARIES="$openmp/libarcher.so" "$cache/threads"
