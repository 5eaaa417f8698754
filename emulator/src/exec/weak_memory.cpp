// SPDX-License-Identifier: Apache-2.0
#include "exec/weak_memory.h"

#include <algorithm>

namespace vsm::exec {
namespace {

constexpr uint64_t kPageBytes = 4096;

uint8_t* byte_at(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

// Calls fn(word, mask, first) for the words that hold these bytes; `first` is the place of the mask's lowest byte in them.
template <class F>
void each_word(uint64_t address, uint32_t bytes, F fn) {
  const uint64_t end = address + bytes;
  for (uint64_t word = address / 4; word * 4 < end; ++word) {
    uint8_t mask = 0;
    for (uint64_t i = 0; i < 4; ++i) mask |= static_cast<uint8_t>((word * 4 + i >= address && word * 4 + i < end) << i);
    fn(word, mask, std::max(word * 4, address) - address);
  }
}

}  // namespace

bool WeakMemory::touched(uint64_t address, uint32_t bytes) const {
  for (uint64_t page = address / kPageBytes; page <= (address + bytes - 1) / kPageBytes; ++page) {
    if (pages_.count(page)) return true;
  }
  return false;
}

void WeakMemory::note_change(uint64_t block, uint64_t word, uint8_t mask) {
  Change c = {++time_, block, mask, {}};
  for (size_t i = 0; i < 4; ++i) {
    if (mask >> i & 1) c.before[i] = *byte_at(word * 4 + i);
  }
  changes_[word].push_back(c);
}

// Bytes of a word that wait.
void WeakMemory::publish(uint64_t block, uint64_t word, Word& w, uint8_t mask) {
  mask &= w.mask;
  if (!mask) return;
  note_change(block, word, mask);
  for (size_t i = 0; i < 4; ++i) {
    if (mask >> i & 1) *byte_at(word * 4 + i) = w.bytes[i];
  }
  w.mask &= static_cast<uint8_t>(~mask);
  if (w.mask) return;
  const auto it = waiting_.find(word);
  it->second.erase(std::find(it->second.begin(), it->second.end(), block));
  if (it->second.empty()) waiting_.erase(it);
}

uint64_t WeakMemory::unordered_writer(const Thread& t, uint64_t word, uint8_t mask) const {
  const auto waiting = waiting_.find(word);
  if (waiting != waiting_.end()) {
    for (const uint64_t block : waiting->second) {
      if (block != t.block && (buffers_[block].at(word).mask & mask)) return block;
    }
  }
  const auto changes = changes_.find(word);
  if (changes == changes_.end()) return kNoBlock;
  for (auto c = changes->second.rbegin(); c != changes->second.rend() && c->time > t.acquired; ++c) {
    if (c->block != t.block && (c->mask & mask)) return c->block;
  }
  return kNoBlock;
}

uint64_t WeakMemory::read(const Thread& t, uint64_t address, uint32_t bytes, uint8_t* out, bool strong) {
  std::copy_n(byte_at(address), bytes, out);
  if (!touched(address, bytes)) return kNoBlock;
  // As early as the read may be: mostly right behind the last acquire, at times later.
  const uint64_t choice = random();
  uint32_t as_of = t.acquired;
  if (choice % 4 == 0) as_of += static_cast<uint32_t>(choice / 4 % (time_ - t.acquired + 1));
  const Buffer& own = buffers_[t.block];
  uint64_t writer = kNoBlock;
  each_word(address, bytes, [&](uint64_t word, uint8_t mask, uint64_t first) {
    uint8_t value[4];
    for (size_t i = 0; i < 4; ++i) value[i] = mask >> i & 1 ? *byte_at(word * 4 + i) : 0;
    if (!strong) {
      if (writer == kNoBlock) writer = unordered_writer(t, word, mask);
      const auto changes = changes_.find(word);
      if (changes != changes_.end()) {
        // Not before a write of its own block: that one may be its own, or ordered before.
        for (auto c = changes->second.rbegin(); c != changes->second.rend(); ++c) {
          if (c->time <= as_of || c->block == t.block) break;
          for (size_t i = 0; i < 4; ++i) {
            if (c->mask >> i & 1) value[i] = c->before[i];
          }
        }
      }
    }
    const auto mine = own.find(word);
    if (mine != own.end()) {
      for (size_t i = 0; i < 4; ++i) {
        if (mine->second.mask >> i & 1) value[i] = mine->second.bytes[i];
      }
    }
    for (size_t i = 0; i < 4; ++i) {
      if (mask >> i & 1) out[first++] = value[i];
    }
  });
  return writer;
}

uint64_t WeakMemory::write(const Thread& t, uint64_t address, uint32_t bytes, const uint8_t* data) {
  uint64_t writer = kNoBlock;
  const bool at_once = random() % 8 == 0;
  each_word(address, bytes, [&](uint64_t word, uint8_t mask, uint64_t first) {
    if (writer == kNoBlock) writer = unordered_writer(t, word, mask);
    pages_.insert(word * 4 / kPageBytes);
    Word& w = buffers_[t.block][word];
    // Another write of the byte goes out first: it may be ordered before something that this one is not.
    uint8_t others = 0;
    for (size_t i = 0; i < 4; ++i) {
      others |= static_cast<uint8_t>((w.thread[i] != t.index || w.version[i] != t.version) << i);
    }
    if (w.mask & mask & others) publish(t.block, word, w, mask & others);
    if (!w.mask) waiting_[word].push_back(t.block);
    w.mask |= mask;
    for (size_t i = 0; i < 4; ++i) {
      if (!(mask >> i & 1)) continue;
      w.bytes[i] = data[first++];
      w.thread[i] = t.index;
      w.version[i] = t.version;
    }
    if (at_once) publish(t.block, word, w, mask);
  });
  return writer;
}

void WeakMemory::before_publishing(uint64_t block, uint64_t address, uint32_t bytes) {
  each_word(address, bytes, [&](uint64_t word, uint8_t mask, uint64_t) {
    pages_.insert(word * 4 / kPageBytes);
    const auto mine = buffers_[block].find(word);
    if (mine != buffers_[block].end()) publish(block, word, mine->second, mask);
    note_change(block, word, mask);
  });
}

void WeakMemory::publish(uint64_t block, const uint32_t* released) {
  Buffer& buffer = buffers_[block];
  for (auto it = buffer.begin(); it != buffer.end();) {
    Word& w = it->second;
    uint8_t mask = 0;
    for (size_t i = 0; i < 4; ++i) mask |= static_cast<uint8_t>((released[w.thread[i]] >= w.version[i]) << i);
    publish(block, it->first, w, mask);
    it = w.mask ? std::next(it) : buffer.erase(it);
  }
}

void WeakMemory::publish_some(uint64_t block) {
  if (random() % 4) return;
  Buffer& buffer = buffers_[block];
  for (auto it = buffer.begin(); it != buffer.end();) {
    if (random() % 8 == 0) publish(block, it->first, it->second, 15);
    it = it->second.mask ? std::next(it) : buffer.erase(it);
  }
}

void WeakMemory::publish_all() {
  for (uint64_t block = 0; block < buffers_.size(); ++block) {
    for (auto& item : buffers_[block]) publish(block, item.first, item.second, 15);
    buffers_[block].clear();
  }
}

}  // namespace vsm::exec
