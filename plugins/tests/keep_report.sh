#!/bin/sh
# Runs a compiler and keeps what it prints to standard error beside the object, as OBJECT.report.
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
if [ -z "$object" ]; then exec "$@"; fi
"$@" 2> "$object.report"
status=$?
[ $status -eq 0 ] || cat "$object.report" >&2
exit $status
