#include "worker/load/sample_text.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"

namespace kvasir::cli {
namespace {

// A text of about 512 tokens. It was written for Kvasir, so it is unlikely that
// a model was trained on it.
constexpr char kText[] =
    R"(The old harbour of Lindesund lies at the mouth of a short, cold river. For
three centuries its people lived from salt, herring and timber, and every
spring a fleet of forty boats left for the banks in the west. In 1867 a fire
that began in a bakery destroyed half of the wooden town within one night. The
council then decided that new houses had to be built of stone, with streets at
least twelve metres wide, so that sparks could no longer jump from roof to roof.

How does a lighthouse make its light visible at a distance of thirty kilometres?
The lamp itself is not especially bright. Around it stands a lens of glass
rings, each with a slightly different angle, which bend the light into a narrow
horizontal beam. Because the lens turns, a sailor sees a flash every ten
seconds, and its rhythm tells which lighthouse it is. Before electric motors,
a weight on a chain turned the lens, and the keeper had to wind it up again
every four hours.

"You are late," said Marta, without looking up from her nets. "The tide will not
wait for you, and neither will I."
"I know," he answered. "The bridge was closed. They are repairing it until
Friday, so I had to walk around the bay."
She laughed. "Then you have had your exercise today. Take the other end of this
rope, and tell me what the doctor said about your brother."

To make bread for four people, mix 500 g of flour with 350 ml of warm water, 10 g
of salt and 7 g of dry yeast. Knead the dough for ten minutes, cover it with a
cloth, and let it rest for one hour. Then heat the oven to 230 degrees and bake
the loaf for 35 minutes.

def mean(values):
    if not values:
        raise ValueError("mean of an empty list")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

In the end the committee agreed on three points: the harbour would be made
deeper by two metres, the costs would be shared between the town and the state,
and the work would begin no later than the first of May.)";

}  // namespace

std::vector<int32_t> SampleTokens(const model::Tokenizer* tokenizer,
                                  int64_t count) {
  if (tokenizer == nullptr) return {};
  absl::StatusOr<std::vector<int32_t>> ids = tokenizer->Encode(kText);
  if (!ids.ok()) return {};
  ids->resize(std::min(ids->size(), static_cast<size_t>(count)));
  return *std::move(ids);
}

}  // namespace kvasir::cli
