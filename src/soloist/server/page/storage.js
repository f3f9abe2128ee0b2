// What the browser remembers. Storage may be forbidden or full; whoever writes learns whether it is.

// The storage itself, or null where it is forbidden.
export function storageOf(storage) {
  try {
    return window[storage];
  } catch {
    return null;
  }
}

export function recall(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null; // forbidden
  }
}

export function remember(storage, name, value) {
  try {
    window[storage].setItem(name, value);
    return true;
  } catch {
    return false;
  }
}
