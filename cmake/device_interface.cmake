# Writes a fingerprint to OUT of everything that a program and a device module must
# agree on: the HEADERS (a list) below ROOT, and BUILD.
set(hashes "${BUILD}")
foreach(header IN LISTS HEADERS)
  file(SHA256 ${ROOT}/${header} hash)
  string(APPEND hashes "\n${header} ${hash}")
endforeach()
string(SHA256 name "${hashes}")
string(SUBSTRING ${name} 0 16 name)
file(WRITE ${OUT} "#pragma once\n#define KVASIR_DEVICE_INTERFACE \"${name}\"\n")
