#!/bin/sh
# Bring up a fleet of models on a running server, one at a time, through its admin API.
#
#   tools/deploy.sh [-u URL] [-t SECONDS] [-s SECONDS] FLEET     ("-" reads the fleet from stdin)
#
#   -u  the server (default: http://127.0.0.1:8201)
#   -t  how long one model may take to load (default: 600)
#   -s  how long memory may take to settle after a load (default: 120)
#
# FLEET has a line for each instance: NAME FILE [DIES] [CTX]; "-" leaves a column out, "#" begins a comment.
#
#   orch    orchestrator.gguf  0,1  8192
#   worker  worker.gguf        2
#   worker  worker.gguf        3
#
# Each model is asked for only when GET /admin/plan says that it fits, and only after the one before it is ready and the
# server's memory has left TIGHT and CRITICAL.  A model that is there already is kept.  Ends with 0 when all are up,
# else with 1 and the name of the model that was refused on stderr; what is up by then stays up.
# PANTHEON_ADMIN_KEY is sent when set.
set -eu

url=http://127.0.0.1:8201
load_s=600
settle_s=120
while getopts u:t:s: flag; do
    case $flag in
        u) url=${OPTARG%/} ;;
        t) load_s=$OPTARG ;;
        s) settle_s=$OPTARG ;;
        *) sed -n '2,5p' "$0" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -eq 1 ] || { sed -n '2,5p' "$0" >&2; exit 2; }

body=$(mktemp)
fleet=$(mktemp)
trap 'rm -f "$body" "$fleet"' EXIT
trap 'exit 130' INT TERM

say() { echo "deploy: $*"; }
fail() { echo "deploy: error: $*" >&2; exit 1; }

# ask METHOD PATH [JSON]: the status on stdout, the answer in $body; the key never stands in the list of processes
ask() {
    {
        [ -z "${PANTHEON_ADMIN_KEY:-}" ] || printf 'header = "Authorization: Bearer %s"\n' "$PANTHEON_ADMIN_KEY"
    } | curl -K - -sS -o "$body" -w '%{http_code}' --max-time 60 -X "$1" \
        ${3:+-H 'Content-Type: application/json' --data-binary "$3"} "$url$2" || echo 000
}

# field EXPRESSION: of the answer, which is called `a`
field() {
    python3 -IS -c 'import json, sys
try:
    a = json.load(open(sys.argv[1]))
    found = eval(sys.argv[2])
except Exception:
    found = ""
print("" if found is None else found)' "$body" "$1"
}

# message: what the server said was wrong
message() { field '(a.get("error") or {}).get("message") or a.get("reason") or ""'; }

quoted() {
    case $1 in
        *[!A-Za-z0-9._-]*) python3 -IS -c 'import sys, urllib.parse; print(urllib.parse.quote(sys.argv[1], safe=""))' "$1" ;;
        *) echo "$1" ;;
    esac
}

# settle: wait until memory is neither TIGHT nor CRITICAL, two looks in a row
settle() {
    end=$(($(date +%s) + settle_s))
    calm=0
    while :; do
        [ "$(ask GET /admin/memory)" = 200 ] || fail "$1: no answer from $url/admin/memory: $(message)"
        level=$(field 'a.get("level") or "OK"')
        case $level in
            TIGHT | CRITICAL) calm=0 ;;
            *) calm=$((calm + 1)) ;;
        esac
        [ $calm -lt 2 ] || break
        [ "$(date +%s)" -lt "$end" ] || fail "$1: memory is still $level after $settle_s s"
        sleep 0.3
    done
}

# bring_up NAME FILE DIES CTX
bring_up() {
    request=$(python3 -IS -c 'import json, sys
name, path, dies, ctx = (None if word == "-" else word for word in sys.argv[1:])
body = {"name": name, "path": path, "wait": False}
if dies: body["dies"] = [int(die) for die in dies.split(",")]
if ctx: body["ctx"] = int(ctx)
print(json.dumps(body))' "$@" 2> /dev/null) || fail "$1: bad line: DIES are numbers such as 0,1 and CTX is one"
    place=/admin/models/$(quoted "$1")

    status=$(ask GET "$place")
    if [ "$status" = 200 ] && [ "$3" = - ] && [ "$(field 'a["status"]')" = ready ]; then
        say "$1 is there already"
        return
    fi
    dies=$3
    [ "$dies" != - ] || dies=
    ctx=$4
    [ "$ctx" != - ] || ctx=
    status=$(ask GET "/admin/plan?model=$(quoted "$2")${dies:+&dies=$dies}${ctx:+&ctx=$ctx}")
    [ "$status" = 200 ] || fail "$1: refused: $(message) (status $status)"
    [ "$(field 'a["fits"]')" = True ] || fail "$1: refused: $(message)"

    status=$(ask POST /admin/models/load "$request")
    [ "$status" = 202 ] || fail "$1: refused: $(message) (status $status)"
    say "$1 loads"
    end=$(($(date +%s) + load_s))
    while :; do
        status=$(ask GET "$place")
        [ "$status" = 200 ] || fail "$1: failed: $(message) (status $status)"
        case $(field '"refused" if a.get("error") else a["status"]') in
            refused) fail "$1: refused: $(message)" ;;
            ready) break ;;
        esac
        [ "$(date +%s)" -lt "$end" ] || fail "$1: not ready after $load_s s"
        sleep 0.3
    done
    say "$1 is ready"
    settle "$1"
}

if [ "$1" = - ]; then cat > "$fleet"; else cat "$1" > "$fleet" || fail "can not read $1"; fi
status=$(ask GET /admin/models)
[ "$status" = 200 ] || fail "no admin API at $url (status $status): $(message)"
count=0
while read -r name file dies ctx rest || [ -n "$name" ]; do
    case $name in '' | '#'*) continue ;; esac
    [ -n "$file" ] && [ -z "$rest" ] || fail "$name: bad line: NAME FILE [DIES] [CTX]"
    # the loop must not lose its input to a command inside
    bring_up "$name" "$file" "${dies:--}" "${ctx:--}" < /dev/null
    count=$((count + 1))
done < "$fleet"
say "$count instances are up at $url"
