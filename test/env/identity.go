// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Identity is who a program in a cluster is: a service account and, as for every program that runs in a pod, the pod to
// which its token is bound. A token of a pod on a node carries the node's name, which is how the API server tells one
// node's agent from another's.
type Identity struct {
	Namespace, ServiceAccount string
	Pod                       string            // empty: the token is bound to no pod
	PodLabels                 map[string]string // of the pod, if it does not exist yet
	Node                      string            // on which the pod runs
}

// tokenSeconds is how long a token is valid: longer than any test or demo runs.
const tokenSeconds = 12 * 60 * 60

// ConfigAs is the configuration of a client with an identity. Namespace, service account and pod are created where they
// do not exist; what they may do is up to the RBAC objects that were applied.
func (c *Cluster) ConfigAs(ctx context.Context, id Identity) (*rest.Config, error) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: id.Namespace, Name: id.ServiceAccount}}
	objects := []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: id.Namespace}}, account}
	pod := podOf(id)
	if id.Pod != "" {
		objects = append(objects, pod)
	}
	for _, o := range objects {
		if err := client.IgnoreAlreadyExists(c.Client.Create(ctx, o)); err != nil {
			return nil, fmt.Errorf("creating %T %s: %w", o, o.GetName(), err)
		}
	}
	token, err := c.token(ctx, account, pod, id.Pod != "")
	if err != nil {
		return nil, err
	}
	config := rest.AnonymousClientConfig(c.Config)
	config.BearerToken = token
	return config, nil
}

// ClientAs is a client, not cached, with an identity.
func (c *Cluster) ClientAs(ctx context.Context, id Identity) (client.Client, error) {
	config, err := c.ConfigAs(ctx, id)
	if err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: c.Scheme})
}

func podOf(id Identity) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: id.Namespace, Name: id.Pod, Labels: id.PodLabels},
		Spec: corev1.PodSpec{
			ServiceAccountName: id.ServiceAccount,
			NodeName:           id.Node,
			Containers:         []corev1.Container{{Name: "main", Image: "example.invalid/simulated"}},
		},
	}
}

func (c *Cluster) token(ctx context.Context, account *corev1.ServiceAccount, pod *corev1.Pod, bound bool) (string, error) {
	seconds := int64(tokenSeconds)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}
	if bound {
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
			return "", fmt.Errorf("reading the pod %s/%s to which a token is bound: %w", pod.Namespace, pod.Name, err)
		}
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
		}
	}
	if err := c.Client.SubResource("token").Create(ctx, account, request); err != nil {
		return "", fmt.Errorf("requesting a token for the service account %s/%s: %w", account.Namespace, account.Name, err)
	}
	return request.Status.Token, nil
}

// KubeconfigFile is the path of a file with which kubectl and other programs use a client configuration.
func KubeconfigFile(t *testing.T, config *rest.Config) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := WriteKubeconfig(config, file); err != nil {
		t.Fatal(err)
	}
	return file
}

// WriteKubeconfig writes such a file, which only its owner can read.
func WriteKubeconfig(config *rest.Config, file string) error {
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		CurrentContext: "gpusharing",
		Contexts:       map[string]*clientcmdapi.Context{"gpusharing": {Cluster: "gpusharing", AuthInfo: "user"}},
		Clusters: map[string]*clientcmdapi.Cluster{"gpusharing": {
			Server: config.Host, CertificateAuthorityData: config.CAData,
		}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"user": {
			Token: config.BearerToken, ClientCertificateData: config.CertData, ClientKeyData: config.KeyData, Impersonate: config.Impersonate.UserName,
		}},
	}, file)
	if err != nil {
		return fmt.Errorf("writing a kubeconfig: %w", err)
	}
	return nil
}
