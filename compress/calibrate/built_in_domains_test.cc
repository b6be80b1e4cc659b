#include "compress/calibrate/built_in_domains.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "base/status_matchers.h"
#include "compress/calibrate/calibration_sample.h"
#include "compress/calibrate/token_stream.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::compress {
namespace {

// The default number of calibration tokens of kvasir-compress.
constexpr int64_t kTokens = 114688;

TEST(BuiltInDomainsTest,
     TheBuiltInTextsAreFourDomainsWithoutNulOrCarriageReturnCharacters) {
  std::vector<std::string> names;
  size_t bytes = 0;
  for (const BuiltInDomain& domain : BuiltInDomains()) {
    names.push_back(domain.name);
    bytes += domain.text.size();
    EXPECT_EQ(domain.text.back(), '\n') << domain.name;
    EXPECT_EQ(domain.text.find('\0'), std::string_view::npos) << domain.name;
    EXPECT_EQ(domain.text.find('\r'), std::string_view::npos) << domain.name;
  }
  EXPECT_THAT(
      names, testing::ElementsAre("books", "encyclopedia", "code", "dialogue"));
  EXPECT_LT(bytes, size_t{1'000'000});
}

TEST(BuiltInDomainsTest, EachDomainHasEnoughTokensForItsShare) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<model::Tokenizer> tokenizer,
      model::Tokenizer::Load(std::string(std::getenv("KVASIR_SOURCE_DIR")) +
                             "/models/tiny"));
  std::vector<DomainText> domains;
  for (const BuiltInDomain& domain : BuiltInDomains()) {
    KVASIR_ASSERT_OK_AND_ASSIGN(TokenStream text,
                                EncodeText(domain.text, *tokenizer, 2));
    domains.push_back({domain.name, std::move(text)});
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample sample,
      SampleDomains(domains, {.tokens = kTokens, .sequence_tokens = 512}, 0.1,
                    tokenizer->vocab_size()));
  EXPECT_EQ(sample.num_tokens(), kTokens);
}

// Plans must be evaluated on texts that were not used to make them.
TEST(BuiltInDomainsTest, FewLinesOfEvaluationTextsAreAlsoInCalibrationTexts) {
  const std::filesystem::path folder =
      std::string(std::getenv("KVASIR_SOURCE_DIR")) +
      "/compress/calibrate/domains/evaluation";
  for (const BuiltInDomain& domain : BuiltInDomains()) {
    std::ifstream in(folder / (std::string(domain.name) + ".txt"));
    std::string line;
    int lines = 0;
    int shared = 0;
    while (std::getline(in, line)) {
      if (line.size() < 60) continue;
      ++lines;
      shared += domain.text.find(line) == std::string_view::npos ? 0 : 1;
    }
    // Some common lines are allowed: licences in code and questions in
    // dialogues occur in many texts.
    EXPECT_LE(shared, lines / 5) << domain.name;
    EXPECT_GT(lines, 5) << domain.name;
  }
}

}  // namespace
}  // namespace kvasir::compress
