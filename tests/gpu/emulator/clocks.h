// Vector clocks for streams: whether a device would have been allowed to run two kernels in the other order.
//
// Each kernel of a stream has a number. The clock of a stream says up to which kernel of every stream its next
// kernel is ordered. Waiting for an event joins clocks. Two kernels that touch the same bytes, one of them
// writing, must be ordered; otherwise the pair is reported.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emulator {
using Clock = std::vector<uint64_t>;  // by stream

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}
inline uint64_t at(const Clock& clock, int64_t stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

// Whether it has seen all that the other one has.
inline bool covers(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i)
    if (at(clock, static_cast<int64_t>(i)) < other[i]) return false;
  return true;
}

struct Access {
  uintptr_t begin, end;
  int64_t stream;
  uint64_t number;
  bool write;
  std::string where;
};

struct Block {
  size_t size;
  int64_t stream;              // that allocated it, and gets it back
  std::set<int64_t> recorded;  // by record_stream
  std::vector<Access> accesses;
};

struct Delivery {
  int64_t stream;
  uint64_t number;
  std::function<void()> copy;
};

struct Race {
  std::string kind, now, before;
};

class World {
 public:
  std::recursive_mutex lock;

  int64_t new_stream() { return streams_++; }

  // The clock of a stream, after so many more kernels.
  Clock& clock(int64_t stream, uint64_t more = 0) {
    if (clocks_.size() <= static_cast<size_t>(stream)) clocks_.resize(stream + 1);
    Clock& own = clocks_[stream];
    join(own, host_);  // what the host has waited for comes before all that it issues
    if (own.size() <= static_cast<size_t>(stream)) own.resize(stream + 1, 0);
    own[stream] += more;
    return own;
  }
  // Nanoseconds that a stream has worked or waited. A byte that a kernel reads or writes takes one of them, and
  // whoever waits for an event is not earlier than it. The host takes no time.
  uint64_t& time(int64_t stream) {
    if (times_.size() <= static_cast<size_t>(stream)) times_.resize(stream + 1, 0);
    return times_[stream];
  }
  bool host_knows(const Clock& clock) const { return covers(host_, clock); }

  // From here on nothing on this stream ends, as when a peer does not take part in a collective.
  void stick(int64_t stream) { stuck_.try_emplace(stream, clock(stream, 1)[stream]); }
  void free_stuck() { stuck_.clear(); }
  bool ends(const Clock& clock) const {
    return std::none_of(stuck_.begin(), stuck_.end(), [&](auto& s) { return at(clock, s.first) >= s.second; });
  }

  void host_waits_for(const Clock& clock) {
    ++host_waits;
    join(host_, clock);
    std::vector<Delivery> later;
    for (auto& delivery : deliveries_)
      if (at(host_, delivery.stream) >= delivery.number) delivery.copy();
      else later.push_back(std::move(delivery));
    deliveries_ = std::move(later);
  }
  void host_waits_for_all() {
    Clock all;
    for (int64_t stream = 0; stream < streams_; ++stream) join(all, clock(stream));
    host_waits_for(all);
  }

  // An asynchronous copy to the host, after what the stream has done so far: it happens when the host has waited
  // for that, and no earlier. A host that does not wait reads what was there before.
  void deliver(int64_t stream, std::function<void()> copy) {
    deliveries_.push_back({stream, at(clock(stream), stream), std::move(copy)});
  }

  void allocated(uintptr_t address, size_t size, int64_t stream) {
    reuse_freed(stream);
    blocks_[address] = Block{size, stream, {}, {}};
  }

  void freed(uintptr_t address) {
    auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    for (int64_t stream : found->second.recorded) {  // the allocator waits for what is before this on the stream
      Clock& until = clock(stream);
      std::erase_if(found->second.accesses, [&](Access& use) { return at(until, use.stream) >= use.number; });
    }
    freed_.push_back(std::move(found->second));
    blocks_.erase(found);
  }

  void record(uintptr_t address, int64_t stream) {
    if (Block* block = holding(address)) block->recorded.insert(stream);
  }

  void access(uintptr_t begin, uintptr_t end, int64_t stream, bool write, const std::string& where) {
    Block* block = holding(begin);
    if (!block) return;
    time(stream) += end - begin;
    Clock& own = clock(stream);
    std::vector<Access> kept;
    for (auto& other : block->accesses) {
      bool ordered = other.stream == stream || at(own, other.stream) >= other.number;
      bool overlap = other.begin < end && begin < other.end;
      if (overlap && !ordered && (write || other.write)) races.push_back({kind(write, other.write), where, other.where});
      bool replaced = write && ordered && begin <= other.begin && other.end <= end;
      if (!replaced) kept.push_back(other);  // whoever is ordered after a replaced one is ordered after this one
    }
    block->accesses = std::move(kept);
    uint64_t number = clock(stream, 1)[stream];
    block->accesses.push_back({begin, end, stream, number, write, where});
  }

  std::vector<Race> races;
  size_t host_waits = 0;

 private:
  static const char* kind(bool write, bool before) {
    return !write ? "read after write" : before ? "write after write" : "write after read";
  }

  Block* holding(uintptr_t address) {
    auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) return nullptr;
    auto& [start, block] = *--next;
    return address < start + std::max<size_t>(block.size, 1) ? &block : nullptr;
  }

  // The caching allocator gives a freed block to the next allocation on its own stream. By then all kernels that
  // use it must be ordered before that stream, unless record_stream was called.
  void reuse_freed(int64_t stream) {
    std::vector<Block> kept;
    for (auto& block : freed_) {
      if (block.stream != stream) {
        kept.push_back(std::move(block));
        continue;
      }
      for (auto& use : block.accesses)
        if (use.stream != stream && at(clock(stream), use.stream) < use.number)
          races.push_back({"freed while in use", "the next allocation on its stream", use.where});
    }
    freed_ = std::move(kept);
  }

  std::vector<Clock> clocks_{Clock{}};
  std::vector<uint64_t> times_;  // by stream
  Clock host_;
  std::vector<Delivery> deliveries_;
  std::map<int64_t, uint64_t> stuck_;  // by stream: from which kernel on
  int64_t streams_ = 1;
  std::map<uintptr_t, Block> blocks_;  // by address
  std::vector<Block> freed_;
};
}  // namespace emulator
