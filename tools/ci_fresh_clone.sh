#!/bin/sh
# A stranger's first minutes, rehearsed: clone HEAD into a temporary folder with a new HOME, `make serve`, ask it
# something over HTTP, then `make test`.  Heavy: it downloads the dependencies and compiles every kernel.
#   sh tools/ci_fresh_clone.sh [serve|test|all]
set -eu
what=${1:-all}
source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
server=
finish() {
    if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

git clone --quiet --no-hardlinks "$source" "$work/pantheon"
mkdir "$work/home"
export HOME="$work/home"
unset PN_KERNEL_CACHE XDG_CACHE_HOME VIRTUAL_ENV
cd "$work/pantheon"

if [ "$what" != test ]; then
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    url="http://127.0.0.1:$port"
    started=$(date +%s)
    make serve ARGS="--port $port" & server=$!
    until curl -sf "$url/health" >/dev/null; do
        kill -0 "$server" 2>/dev/null || { echo "make serve ended early"; server=; exit 1; }
        [ $(($(date +%s) - started)) -lt 900 ] || { echo "no /health after 15 minutes"; exit 1; }
        sleep 1
    done
    echo "serving after $(($(date +%s) - started)) s"
    answer=$(curl -sf "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{"temperature": 0,
        "max_tokens": 200, "messages": [{"role": "user", "content": "Give me three tips for staying healthy."}]}')
    echo "$answer"
    case $answer in *exercise* | *sleep* | *diet* | *water*) ;; *) echo "that is not a sensible answer"; exit 1 ;; esac
    kill "$server"
    wait "$server" || true
    server=
fi
if [ "$what" != serve ]; then
    started=$(date +%s)
    .ci/run
    echo "make test took $(($(date +%s) - started)) s"
fi
test -z "$(git status --porcelain)" || { echo "the clone is dirty afterwards:"; git status --short; exit 1; }
echo "fresh clone: ok"
