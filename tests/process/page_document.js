// The part of a browser's document that the page of `kvasir inspect` uses. Its
// script runs against this and leaves a tree that is written out as HTML.
"use strict";

const escaped = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;");

class Element {
  constructor(name) {
    this.name = name;
    this.attributes = "";
    this.children = [];
    this.listeners = {};
  }
  addEventListener(event, listener) {
    this.listeners[event] = listener;
  }
  // All elements below this one that have this name.
  find(name) {
    return this.children.filter(child => child instanceof Element)
        .flatMap(child => [...child.name === name ? [child] : [],
                           ...child.find(name)]);
  }
  setAttribute(name, value) {
    this.attributes += ` ${name}="${escaped(String(value))}"`;
  }
  append(...children) {
    this.children.push(...children);
  }
  replaceChildren(...children) {
    this.children = children;
  }
  get outerHTML() {
    const inside = this.children.map(child => child instanceof Element
        ? child.outerHTML : escaped(String(child)));
    return `<${this.name}${this.attributes}>${inside.join("")}</${this.name}>`;
  }
}

const main = new Element("main");
// `pageData` is the text of the page's data.
const document = {
  getElementById: () => ({textContent: pageData}),
  createElementNS: (namespace, name) => new Element(name),
  querySelector: () => main,
};
