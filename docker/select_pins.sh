#!/bin/sh
# Print the entries of requirements.lock, with their hashes, that requirements.txt pins.
set -eu
awk '
    function same(pin) { pin = tolower(pin); gsub(/[-_.]+/, "-", pin); return pin }
    FNR == NR { if (/==/) wanted[same($1)] = 1; next }
    /^[^ #]/ { is_wanted = (same($1) in wanted) }
    is_wanted
' requirements.txt requirements.lock
