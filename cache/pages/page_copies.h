// Collects the page copies that the next step does before it writes anything.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cache/layout/layout.h"
#include "cache/pages/page_pool.h"
#include "google/protobuf/repeated_field.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::cache {

// A list of copies within the device pool, and between it and the host pool.
// The executor does them in the listed order, so a page of either pool may be
// reused as soon as the copy that reads it is listed.
// Threads: used only by the scheduler thread.
class PageCopies {
 public:
  kvasir::v1::PageCopy& List(PageGroupId group, PageId from, PageId to) {
    kvasir::v1::PageCopy& copy = copies_.emplace_back();
    copy.set_page_group(static_cast<uint32_t>(group.value()));
    copy.set_from_page(from.value());
    copy.set_to_page(to.value());
    return copy;
  }
  void ListToHost(PageGroupId group, PageId from, PageId to) {
    List(group, from, to).set_to_host(true);
    copies_host_pages_ = true;
  }
  void ListFromHost(PageGroupId group, PageId from, PageId to) {
    List(group, from, to).set_from_host(true);
    copies_host_pages_ = true;
  }

  size_t size() const { return copies_.size(); }
  // True if a listed copy reads or writes a page of the host pool.
  bool copies_host_pages() const { return copies_host_pages_; }

  // Appends all copies to `out` and empties the list.
  void Take(google::protobuf::RepeatedPtrField<kvasir::v1::PageCopy>* out) {
    for (kvasir::v1::PageCopy& copy : copies_) *out->Add() = std::move(copy);
    copies_.clear();
    copies_host_pages_ = false;
  }

 private:
  std::vector<kvasir::v1::PageCopy> copies_;
  bool copies_host_pages_ = false;
};

}  // namespace kvasir::cache
