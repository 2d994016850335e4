#!/bin/sh
# Custom plugin of node-problem-detector: asks the gpumap of this node about one condition, or about all.
#   gpumap-check.sh [CONDITION]
# GPUMAP_URL           gpumap of this node; default http://127.0.0.1:9401
# NODE_NAME            gpumap must have this node name; node-problem-detector's manifest sets it
# GPUMAP_CURL_OPTIONS  options of curl for TLS and passwords: --cacert FILE --netrc-file FILE
# Exit code 0: the GPUs work. 1: a problem. 2: unknown, also if gpumap does not answer.
# node-problem-detector's image has bash, but neither curl nor wget.

url=${GPUMAP_URL:-http://127.0.0.1:9401}
url=${url%/}
path="/api/v1/check?node=${NODE_NAME:-}${1:+&only=$1}"

ask() {
  if command -v curl >/dev/null 2>&1; then
    # shellcheck disable=SC2086 # several options
    curl --silent --max-time 4 ${GPUMAP_CURL_OPTIONS:-} "$url$path"
    return
  fi
  if command -v wget >/dev/null 2>&1; then
    timeout 4 wget -q -O - "$url$path"
    return
  fi
  case $url in
  http://*/*/* | https://*) echo "2 curl or wget is required for $url" && return ;;
  esac
  address=${url#http://}
  case $address in
  *"]") address=$address:80 ;;
  *:*) ;;
  *) address=$address:80 ;;
  esac
  # The answer is the last line, after the headers.
  timeout 4 bash -c '
    host=${1#[} # of an IPv6 address
    exec 3<>"/dev/tcp/${host%]}/$2" || exit
    printf "GET %s HTTP/1.0\r\nHost: %s\r\n\r\n" "$3" "$1" >&3
    while read -r line || [ -n "$line" ]; do answer=$line; done <&3
    echo "$answer"' ask "${address%:*}" "${address##*:}" "$path" 2>/dev/null
}

answer=$(ask)
case $answer in
[012]" "*)
  echo "${answer#? }"
  exit "${answer%% *}"
  ;;
esac
echo "gpumap does not answer at $url"
exit 2
