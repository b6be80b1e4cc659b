// SHA-256, for names of contents and of secrets.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::base {

// 64 hex digits: what sha256sum says of a file with these bytes.
std::string Sha256Hex(std::string_view bytes);

// Takes as long whatever the bytes are, for texts of one length (others are not
// equal at once): who measures it learns nothing of a secret.
bool EqualInConstantTime(std::string_view a, std::string_view b);

}  // namespace kvasir::base
