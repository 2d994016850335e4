// Describes elements, and updates the document to match. It keeps existing elements, and with them focus, selection and
// scroll position. It sets text only as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const descriptions = new WeakMap(); // element → its last description

export function h(tag, attributes, ...children) {
  const present = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  return { tag, attributes: attributes ?? {}, children: present };
}

/** Update the children of `parent` to match `wanted`: descriptions and texts. */
export function fill(parent, wanted) {
  const list = [wanted].flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false);
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  reconcile(parent, list);
  if (focused && focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

function reconcile(parent, wanted) {
  const kept = new Map();
  for (const node of parent.childNodes) {
    const key = descriptions.get(node)?.attributes.key;
    if (key !== undefined) kept.set(key, node);
  }
  const keys = new Set(wanted.map((one) => one.attributes?.key));
  let at = parent.firstChild;
  for (const one of wanted) {
    while (at && keyOf(at) !== undefined && !keys.has(keyOf(at))) at = removed(at);
    const key = one.attributes?.key;
    const candidate = key === undefined ? at : kept.get(key);
    if (candidate && fits(candidate, one)) {
      kept.delete(key);
      if (candidate === at) at = at.nextSibling;
      else parent.insertBefore(candidate, at);
      update(candidate, one);
    } else {
      parent.insertBefore(made(one, parent), at);
    }
  }
  while (at) at = removed(at);
}

const keyOf = (node) => descriptions.get(node)?.attributes.key;

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function fits(node, one) {
  if (one.tag === undefined) return node.nodeType === Node.TEXT_NODE;
  const before = descriptions.get(node);
  return before !== undefined && before.tag === one.tag && before.attributes.key === one.attributes.key;
}

function made(one, parent) {
  if (one.tag === undefined) return document.createTextNode(String(one));
  const inSvg = one.tag === "svg" || parent.namespaceURI === SVG;
  const node = inSvg ? document.createElementNS(SVG, one.tag) : document.createElement(one.tag);
  update(node, one);
  return node;
}

function update(node, one) {
  if (one.tag === undefined) {
    const text = String(one);
    if (node.data !== text) node.data = text;
    return;
  }
  const before = descriptions.get(node)?.attributes ?? {};
  for (const name of Object.keys(before)) if (!(name in one.attributes)) set(node, name, null);
  for (const [name, value] of Object.entries(one.attributes)) if (before[name] !== value) set(node, name, value);
  descriptions.set(node, one);
  reconcile(node, one.children);
}

function set(node, name, value) {
  if (name === "key") return;
  if (name === "width" && !(node instanceof SVGElement)) node.style.width = value ?? "";
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : String(value));
}
