#include "compress/calibrate/built_in_domains.h"

#include <cstddef>

// The assembler includes the text file in the program, because compilers are
// slow with string literals of this size.
#define KVASIR_DOMAIN(name)                           \
  extern "C" const char kvasir_domain_##name[];       \
  extern "C" const char kvasir_domain_##name##_end[]; \
  asm(".pushsection .rodata\n"                        \
      ".global kvasir_domain_" #name                  \
      "\n"                                            \
      ".global kvasir_domain_" #name                  \
      "_end\n"                                        \
      "kvasir_domain_" #name                          \
      ":\n"                                           \
      ".incbin \"" KVASIR_DOMAINS_FOLDER "/" #name    \
      ".txt\"\n"                                      \
      "kvasir_domain_" #name                          \
      "_end:\n"                                       \
      ".byte 0\n"                                     \
      ".popsection\n")

KVASIR_DOMAIN(books);
KVASIR_DOMAIN(code);
KVASIR_DOMAIN(dialogue);
KVASIR_DOMAIN(encyclopedia);

#undef KVASIR_DOMAIN

namespace kvasir::compress {

std::vector<BuiltInDomain> BuiltInDomains() {
  const auto text = [](const char* begin, const char* end) {
    return std::string_view(begin, static_cast<size_t>(end - begin));
  };
  return {
      {"books", text(kvasir_domain_books, kvasir_domain_books_end)},
      {"encyclopedia",
       text(kvasir_domain_encyclopedia, kvasir_domain_encyclopedia_end)},
      {"code", text(kvasir_domain_code, kvasir_domain_code_end)},
      {"dialogue", text(kvasir_domain_dialogue, kvasir_domain_dialogue_end)},
  };
}

}  // namespace kvasir::compress
