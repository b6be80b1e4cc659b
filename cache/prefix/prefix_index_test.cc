#include "cache/prefix/prefix_index.h"

#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"

namespace kvasir::cache {
namespace {

constexpr PageGroupId kGroup(0);

class PrefixIndexTest : public ::testing::Test {
 protected:
  // Publishes a child node with a new page. Nothing else holds the page, so it
  // is cached afterwards.
  PrefixRef Publish(PrefixNodeId parent, const std::vector<int32_t>& ids) {
    PagePin page = *pool_.Allocate();
    const std::vector<PageId> pages = {page.page()};
    return index_.Publish({.parent = parent,
                           .hash = hasher_->Extend(index_.hash(parent), ids),
                           .token_ids = ids,
                           .pages = pages});
  }
  PrefixNodeId Find(PrefixNodeId parent, const std::vector<int32_t>& ids) {
    return index_.FindChild(parent, hasher_->Extend(index_.hash(parent), ids),
                            ids);
  }
  PrefixRef Root(const std::string& salt) {
    return index_.TakeRoot(salt, hasher_->Root(salt));
  }

  const std::unique_ptr<PrefixHasher> hasher_ = MakePrefixHasher("test");
  PagePool pool_{6};
  PrefixIndex index_{{.page_tokens = 2, .max_nodes = 5}, {&pool_}};
};

TEST_F(PrefixIndexTest, FindsTheCachedPagesOfAPrefixByItsTokens) {
  PrefixRef root = Root("");
  PrefixRef a = Publish(root.node(), {1, 2});
  PrefixRef b = Publish(a.node(), {3, 4});
  EXPECT_EQ(index_.FindRoot(""), root.node());
  EXPECT_EQ(Find(root.node(), {1, 2}), a.node());
  EXPECT_EQ(Find(a.node(), {3, 4}), b.node());
  EXPECT_FALSE(Find(root.node(), {3, 4}).valid());
  EXPECT_FALSE(Find(a.node(), {1, 2}).valid());
  EXPECT_EQ(index_.page(a.node(), kGroup), PageId(0));
  EXPECT_EQ(index_.page(b.node(), kGroup), PageId(1));
  KVASIR_EXPECT_OK(index_.CheckInvariants());
}

TEST_F(PrefixIndexTest, PrefixesAreNotSharedBetweenSalts) {
  PrefixRef x = Root("x");
  PrefixRef y = Root("y");
  Publish(x.node(), {1, 2});
  EXPECT_NE(x.node(), y.node());
  EXPECT_TRUE(Find(x.node(), {1, 2}).valid());
  EXPECT_FALSE(Find(y.node(), {1, 2}).valid());
  EXPECT_FALSE(index_.FindRoot("z").valid());
}

TEST_F(PrefixIndexTest, ANodeWithoutPagesStaysInTheIndexWhileItIsReferenced) {
  PrefixRef root = Root("");
  PrefixRef a = Publish(root.node(), {1, 2});
  PrefixRef b = Publish(a.node(), {3, 4});
  root.Reset();
  EXPECT_TRUE(index_.EvictOldest(kGroup));  // the page of a
  a.Reset();
  EXPECT_FALSE(index_.page(b.node(), kGroup) == PageId());
  EXPECT_EQ(index_.num_nodes(), 3);
  KVASIR_EXPECT_OK(index_.CheckInvariants());
  EXPECT_TRUE(index_.EvictOldest(kGroup));  // the page of b
  // All three nodes remain, because `b` is still referenced.
  EXPECT_EQ(index_.num_nodes(), 3);
  b.Reset();  // this also removes its ancestors
  EXPECT_EQ(index_.num_nodes(), 0);
  EXPECT_FALSE(index_.EvictOldest(kGroup));
  KVASIR_EXPECT_OK(index_.CheckInvariants());
}

TEST_F(PrefixIndexTest, PublishingTheSameTokensAgainKeepsTheFirstPage) {
  PrefixRef root = Root("");
  PrefixRef a = Publish(root.node(), {1, 2});
  PrefixRef again = Publish(root.node(), {1, 2});
  EXPECT_EQ(a.node(), again.node());
  EXPECT_EQ(index_.page(a.node(), kGroup), PageId(0));
  EXPECT_EQ(pool_.tag(PageId(1)), -1);
  EXPECT_EQ(pool_.cached_pages(), 1);
}

TEST_F(PrefixIndexTest, PublishingTokensAgainRestoresAnEvictedPage) {
  PrefixRef root = Root("");
  PrefixRef a = Publish(root.node(), {1, 2});
  index_.EvictOldest(kGroup);
  EXPECT_FALSE(index_.page(a.node(), kGroup).valid());
  PrefixRef again = Publish(root.node(), {1, 2});
  EXPECT_EQ(a.node(), again.node());
  EXPECT_TRUE(index_.page(a.node(), kGroup).valid());
  KVASIR_EXPECT_OK(index_.CheckInvariants());
}

TEST_F(PrefixIndexTest, RefusesANewNodeWhenTheIndexIsFull) {
  PrefixRef node = Root("");
  std::vector<PrefixRef> chain;
  for (int32_t i = 0; i < 4; ++i) {
    chain.push_back(Publish(node.node(), {i, i}));
    ASSERT_TRUE(static_cast<bool>(chain.back()));
    node = index_.Ref(chain.back().node());
  }
  EXPECT_EQ(index_.num_nodes(), 5);
  EXPECT_FALSE(static_cast<bool>(Publish(node.node(), {9, 9})));
  EXPECT_FALSE(static_cast<bool>(Root("other")));
  KVASIR_EXPECT_OK(index_.CheckInvariants());
  // The refused page went back to the pool.
  EXPECT_EQ(pool_.free_pages(), 2);
}

TEST_F(PrefixIndexTest, AForgottenPageIsNotFoundButStaysInUse) {
  PrefixRef root = Root("");
  PrefixRef a = Publish(root.node(), {1, 2});
  PagePin pin = pool_.Share(PageId(0));
  index_.Forget(kGroup, PageId(0));
  EXPECT_EQ(pool_.tag(PageId(0)), -1);
  EXPECT_FALSE(index_.page(a.node(), kGroup).valid());
  EXPECT_EQ(pool_.used_pages(), 1);
}

}  // namespace
}  // namespace kvasir::cache
