#!/bin/sh
# ptxas_checked.sh COMPILER...: runs nvcc (through ccache, which replays its messages) and fails where ptxas reports that
# a tensor-core kernel is not what was written: wgmma serialised (C7510, C7511, C7512, C7515), setmaxnreg ignored (C7508), spills.
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" >"$log" 2>&1
status=$?
cat "$log" >&2
if [ $status -eq 0 ] && grep -Eq 'C7508|C7510|C7511|C7512|C7515|Registers are spilled' "$log"; then
  echo "error: ptxas warned about a tensor-core kernel (see above); these warnings fail the build" >&2
  while [ $# -gt 1 ]; do  # no object may be left behind, or the next build would take it
    [ "$1" = -o ] && rm -f "$2"
    shift
  done
  exit 1
fi
exit $status
