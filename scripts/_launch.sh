# Sourced by train_one_node.sh and train_multi_node.sh. `launch STATUS_FILE COMMAND ...` runs a
# launcher and returns its status; 75 if a signal stopped training, which its ranks write into
# STATUS_FILE, because torchrun itself returns 1. SIGTERM, SIGUSR1 and SIGHUP of this script are
# given to the function `forward NAME`, which the caller defines; the script ends after the launcher.
# $linger: seconds for which ranks may still save after their launcher has ended (0).
launch() {
  local status_file="$1" status=0 signalled="" name
  shift
  for name in TERM USR1 HUP; do
    # shellcheck disable=SC2064 # the name of now
    trap "signalled=yes; forward $name || true" "$name"
  done
  trap : INT # Ctrl-C reaches the launcher too
  "$@" --status-file "$status_file" &
  launcher=$!
  while kill -0 "$launcher" 2>/dev/null; do # a signal interrupts wait
    status=0
    wait "$launcher" || status=$?
  done
  if [ -n "$signalled" ]; then
    for ((waited = 0; waited < ${linger:-0}; waited++)); do
      [ ! -s "$status_file" ] || break
      sleep 1
    done
  fi
  if [ -s "$status_file" ]; then
    status=$(<"$status_file")
  fi
  rm -f "$status_file"
  return "$status"
}
